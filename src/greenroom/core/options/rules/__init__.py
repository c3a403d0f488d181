"""Rules by which scheduler options choose how missing experts are computed.

They know no slots and no transfers.
"""
