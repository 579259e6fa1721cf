"""Who leads, for a load balancer or a monitor."""

from django.urls import path

from pgleaderlock.contrib.django import leader_view

urlpatterns = [path("leader", leader_view)]
