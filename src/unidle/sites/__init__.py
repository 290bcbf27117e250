"""Websites that exist nowhere: made from a seed and served on this machine, to train on, to test and to measure."""
