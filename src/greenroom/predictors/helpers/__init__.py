"""Parts that predictors share: kinds, saved states, the token table and compilation."""
