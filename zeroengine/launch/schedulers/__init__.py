"""What schedulers say of a job, and jobs written for them."""
