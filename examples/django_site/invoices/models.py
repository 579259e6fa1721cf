"""What is written behind the fence."""

from django.db import models


class Invoice(models.Model):
    epoch = models.BigIntegerField()
    process = models.IntegerField()
