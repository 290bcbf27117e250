"""Networks: from rows of observations to action parameters and values."""
