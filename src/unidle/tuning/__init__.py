"""What a run could do: probes of its ceilings, what they predict, and what to change."""
