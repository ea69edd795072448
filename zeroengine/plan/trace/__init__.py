"""What a micro-step computes and holds, traced without memory, and the model that it is traced for."""
