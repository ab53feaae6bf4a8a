"""From a prompt to a filled cache: find donors, pull their blocks, check, align, repair, guard, publish.

Read `engine` first: its `ReuseEngine.fill` is the life of a prompt; the other modules are its steps, one file each.
"""
