"""Rules by which scheduler options choose how missing experts are computed.

The rules have no access to slots or transfers.
"""
