"""What to set: budgets of layers and splits of experts, from recordings and measured costs."""
