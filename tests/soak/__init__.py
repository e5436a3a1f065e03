"""The soak: random traffic between processes, every byte verified, and a leak check at the end.

python -m tests.soak --seconds 600 --seed 7

`__main__` starts the processes, kills some and shows what happens; `peer` is one of them. What a
connection does follows from its number alone (`plan`), so that both its ends know it.
"""
