"""The bytes that a rank holds at each moment, and the model that they are predicted for."""
