"""Parts that expert predictors share: kinds, saved states, the token table and compilation."""
