"""Plans: settings of a model on a machine, from recordings and measured costs."""
