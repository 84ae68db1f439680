"""How often the router of a mixture chooses each expert."""
