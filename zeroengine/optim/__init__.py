"""The sharded optimizer with its update backends, loss scaling, and learning-rate schedules."""
