"""Short measurements of each part of a training job."""
