"""The paper: bounds, regret, optima, comparators, figures. Nothing deployed imports it."""
