"""The processes of a group, one a rank: what each holds, and the set as the front sees it."""
