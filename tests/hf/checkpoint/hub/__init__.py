"""Names, downloads and the local cache of models on the hub."""
