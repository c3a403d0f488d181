"""Code that expert predictors share: command-line choice, saved states, a table by token id."""
