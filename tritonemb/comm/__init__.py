"""Exchanges between ranks. Nothing outside of this package calls a collective."""
