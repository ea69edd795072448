"""What is compared, what is chosen, and what fits."""
