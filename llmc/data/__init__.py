"""Training data: token shards, their order, and where a resumed run goes on in them; evaluation files; the tokenizer.

shards      the files of tokens
walk        one rank's way through its shards, in llm.c's order
loader      batches along that way, read a step ahead
order       which positions of a batch hold the same token
resume      where the data goes on after a resume
remainder   the rest of an epoch, dealt out to another number of ranks or batch
evals       multiple-choice questions
tokenizer   ids to bytes, and text to ids
"""
