"""What several tests share: counts, tools of the machine, a pooler."""
