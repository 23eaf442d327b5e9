"""The self-check: does a script train the same when it is watched?"""
