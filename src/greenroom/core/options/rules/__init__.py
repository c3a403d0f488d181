"""Rules by which scheduler options choose how missing experts are computed.

The rules change no slots and start no transfers.
"""
