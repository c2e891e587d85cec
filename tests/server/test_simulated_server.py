"""The simulated server itself: the same script gives the same bytes, and time is spent by steps alone."""

from tests.server.simulated_server import COST, STREAM, SimulatedServer, chat, completion


def run_script() -> tuple[list[bytes], int, float]:
    server = SimulatedServer()
    transports = [server.send(chat(**STREAM, n=2)), server.send(completion(logprobs=2, stop="a"))]
    server.run_for(0.1)
    transports.append(server.send(chat(seed=None)))
    transports[0].feed_eof()
    server.close()
    return [b"|".join(transport.writes) for transport in transports], server.stats.num_steps, server.loop.time()


def test_two_runs_of_a_script_are_the_same_to_the_byte() -> None:
    first = run_script()
    assert all(first[0])
    assert run_script() == first


def test_a_step_takes_its_cost_and_the_loop_runs_on_meanwhile() -> None:
    server = SimulatedServer()
    server.send(completion(prompt=[5] * 10, max_tokens=1))
    ticks: list[float] = []
    server.loop.call_later(0.005, lambda: ticks.append(server.loop.time()))
    assert server.step()
    assert ticks == [0.005]
    assert server.loop.time() == COST.fixed_s + 10 * COST.token_s
    server.close()
