"""The memory of a rank: what states will take, by the rules that the engine allocates with, and what is free.

Where the runtime decides (what is gathered ahead, what fills a bucket, which buffer is used again), its own rules are
run here over numbers.

free_memory          the memory that a rank may still take
state_bytes          the bytes of every state, exactly, before anything is allocated
state_choice         a stage and the places of offloaded states
state_memory         what choices take; the refusal of what cannot fit, and advice where memory ran out
unit_bytes           what a rank holds of one unit; the sums over units are in the files that follow
gathered_bytes, gradient_buffer_bytes, quantized_bytes, two_level_bytes, transient_bytes   buffers
optimizer_state, optimizer_bytes, outer_bytes                                              what updates keep
checkpoint_copy, snapshot_bytes                                                            copies of the states
"""
