"""Config files of other libraries: SB3, rl-zoo, Isaac Lab and ElegantRL."""
