"""The demo: a prefill and a decode process on loopback move DeepSeek-V4 requests through a real transfer engine.

run.py        starts both processes, shows progress, prints the table
prefill.py    owns the source pages; plans and sends, chunk by chunk
decode.py     owns the destination pages; checks every byte of them afterwards
allocator.py  page allocators, and the request churn that fragments them
channel.py    messages between processes
pools.py      the memory of either side, and the pattern in it
"""
