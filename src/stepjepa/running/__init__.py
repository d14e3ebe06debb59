"""A whole run: read the data, build the model, train, save, record."""
