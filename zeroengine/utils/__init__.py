"""What belongs to no subject of its own."""
