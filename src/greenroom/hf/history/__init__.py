"""Records that a model's runs save for later runs: how often each expert was used."""
