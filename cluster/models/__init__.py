"""The model that comes with Tandem, as a folder like any other."""
