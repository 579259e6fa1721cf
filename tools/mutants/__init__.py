"""Plants defects into copies of the source and shows that the tests catch each of them: see `__main__`."""
