"""Models too big for one device: profile, partition, pipeline, planner."""
