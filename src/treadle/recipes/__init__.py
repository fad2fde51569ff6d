"""Recipes shipped with Treadle: YAML files and the small assets they name. No module imports them."""
