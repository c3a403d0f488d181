"""State that a model's runs leave for later runs: frequent experts, counts of experts."""
