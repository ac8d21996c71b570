"""Expert placement by recorded load: which expert lies in which slot; pure NumPy."""
