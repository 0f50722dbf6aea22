"""A search over the values of gin parameters, by Optuna, in the folder of a sweep."""
