"""Scores on language tasks: `gnmr eval`, and `in_training.RunScorer` for runs in training.

    subject = subjects.load_subject("runs/.../RUN")           # or a Hugging Face checkpoint
    scores = scoring.score(subject, ["hellaswag"], limit=100, data=Path("my_tasks"))

Needs the extra finetune, whose packages are imported when first used.
"""
