"""Meta-World: one task, or a whole benchmark such as MT10."""
