"""From measurements to causes and advice."""
