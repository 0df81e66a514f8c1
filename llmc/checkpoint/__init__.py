"""Checkpoints: files in llm.c's formats, whole or not there, that any number of ranks can go on from.

keeper          which checkpoints a run writes, when one counts, and which it replaces
store           the folder: names, completeness, rotation
snapshot        all that a resumed run needs, written and read back
writer          writing while the run waits, or beside it from a copy
model_file      the model .bin
state_file      the state .bin of one rank
extra_file      the .json beside it, of what that has no room for
saved_state     the states of all ranks as one
whole_tensors   tensors that tensor parallelism splits, as the files have them
debug_state     llm.c's debug state, for its C tests
"""
