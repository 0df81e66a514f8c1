"""The memory plan: from tables and options to where every byte of a run lives; and the arenas that put it into effect.

What it is made from:
    tables          every parameter and activation, declared once
    options         the model, the batch, and how a run stores and computes its numbers
    tuning          sizes on which the plan and the code agree
    scratch_sizes   how large scratch is for given options
    ladder          the recompute levels: what is not kept, and the schedule that follows
    activations     which stages each activation must survive
The plan and its arenas:
    placement       who may share bytes
    slots           layers that take turns in a few places
    layout          where a parameter's elements lie in a flat arena, whole or shared
    plan            all of it together
    arena           one allocation per purpose, and the views cut from it
    offload         residuals in host memory
What is known from it before a run:
    cost            FLOPs and bytes moved
    traffic         bytes that ranks send
    largest_batch   the largest batch that fits
    choose          what fits, and the cheapest ways to fit
    report          the plan in words
    traffic_report  what ranks send, in words
And after it:
    record          memory.json: planned beside measured
"""
