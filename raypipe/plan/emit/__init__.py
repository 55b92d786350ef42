"""Layouts of other trainers: the nearest that each can express to a plan, as its own file, and such files read back.

layout.py       what a trainer's file says of a plan
nearest.py      a plan reduced to what a trainer can express, and what that loses
arguments.py, configs.py     the files: Megatron-LM's and torchtitan's arguments, AutoModel's and DeepSpeed's configs
predicted.py    the step and the memory of a layout
"""
