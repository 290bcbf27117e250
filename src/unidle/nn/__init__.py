"""Networks: from packed observations to action parameters and values."""
