"""The scheduler's machine, with one step in flight and with two: short histories, many of them."""

from tests.core.scheduler_machine import SHORT_HISTORIES, OverlapMachine, SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SHORT_HISTORIES
TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = SHORT_HISTORIES
