"""A cluster in virtual time: the real router and engines, with a step's predicted cost in place of the model.

world      the clock, and what happens when
executor   runs a step by letting its predicted time pass
group      one worker group: an engine, its loop, what it reports
leap       many decode steps at once, where nothing but time would pass
peers      KV blocks that groups read from each other
rivals     policies of other routers, to compare with
router     requests in, placed by the real code
run        a whole trace, and what came of it
report     the figures of a run
"""
