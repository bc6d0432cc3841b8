"""The console in a browser, at a real cluster whose processes are killed and replaced."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import DESKTOP, PHONE, ConsolePage, find_chromium, open_console, run_browser
from tests.fault.cluster_commands import member_address, start_new_storage
from tests.gateway_process import GatewayClient, GatewayProcess, run_gateway
from waltz_core.local import LocalCluster, running_cluster

pytestmark = pytest.mark.fault

PAGES = ("#/", "#/partitions/0", "#/partitions/0/transactions", "#/findings", "#/changes")
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    find_chromium()  # otherwise there is nothing to test
    directory = tmp_path_factory.mktemp("console")
    with running_cluster(directory, storage_count=3, server_count=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[GatewayProcess]:
    with run_gateway(cluster.connect) as gateway:
        yield gateway


def append(gateway: GatewayProcess, *texts: str, partition: int = 0, header: int = 0) -> list[int]:
    """Append transactions; return their IDs."""
    client = GatewayClient(gateway.url)
    rows = [{"data": text, "partition": partition, "header": header} for text in texts]
    answer = client.append(*rows)
    client.close()
    assert answer.status == 200, answer
    return [outcome["transaction_id"] for outcome in answer.body["outcomes"]]


def storage_card(console: ConsolePage, address: str, state: str) -> str:
    return f'[data-testid="storage-card"][data-address="{address}"][data-state="{state}"]'


def wait_until_healthy(console: ConsolePage, storage_count: int) -> None:
    text = f"All {storage_count} storages, 2 servers and 4 partitions are up."
    expect(console.page.get_by_test_id("health-line")).to_have_text(text)


def test_the_console_shows_a_killed_storage_as_down_and_can_replace_it(
    browser: Browser, cluster: LocalCluster, gateway: GatewayProcess
):
    before = append(gateway, *(f"before {number}" for number in range(20)))
    old = member_address(cluster, "storage-2")
    with open_console(browser, gateway.url) as console:
        page = console.page
        console.open("#/")
        wait_until_healthy(console, 3)
        seen = len(console.views)
        cluster.kill("storage-2")
        page.wait_for_selector(storage_card(console, old, "down"))
        # The gateway reuses an answer for some time, and may have been creating one at the kill.
        assert len({view.json()["time_ms"] for view in console.views[seen:]}) <= 3
        expect(page.get_by_test_id("problem-list")).to_contain_text(old)

        new = start_new_storage(cluster)
        admin_port = next(
            member.admin_port for member in cluster.members if new.endswith(f":{member.port}")
        )
        console.open("#/changes")
        page.click('[data-change="replace-storage"]')
        page.select_option("#change-storage", old)
        page.fill("#change-replacement", new)
        page.fill("#change-admin_port", str(admin_port))
        page.click("#change-review")
        expect(page.locator("#change-start")).to_be_disabled()
        page.fill("#change-confirm", old)
        page.click("#change-start")
        page.wait_for_selector('[data-testid="change"][data-state="done"]')
        expect(page.locator("#history tr").first).to_contain_text("cluster replace-storage")
        expect(page.locator("#history tr").first).to_contain_text("anonymous via gateway@")

        console.open("#/")
        page.wait_for_selector(storage_card(console, new, "up"))
        wait_until_healthy(console, 3)
        assert page.locator(storage_card(console, old, "down")).count() == 0
        in_sync = page.locator(f'td[data-storage="{new}"] [data-state="in_sync"]')
        expect(in_sync).to_have_count(4)
    assert append(gateway, "after") == [before[-1] + 1]


def test_the_transaction_browser_can_jump_to_an_id_filter_headers_and_follow_the_log(
    browser: Browser, gateway: GatewayProcess
):
    payload = json.dumps({"seat": "12F", "passenger": "<img src=x onerror=alert(1)>"})
    ids = append(gateway, payload, "plain text", partition=1, header=7)
    append(gateway, *(f"filler {number}" for number in range(120)), partition=1)
    with open_console(browser, gateway.url) as console:
        page = console.page
        console.open("#/partitions/1/transactions")
        rows = page.locator("#transactions tr[data-transaction]")
        expect(rows).to_have_count(50)
        page.fill("#header-filter", "7")
        page.press("#header-filter", "Enter")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("<img src=x onerror=alert(1)>")
        page.fill("#header-filter", "")
        page.press("#header-filter", "Enter")
        page.fill("#jump-id", str(ids[1]))
        page.press("#jump-id", "Enter")
        expect(rows.first).to_contain_text("plain text")

        console.open("#/partitions/1/transactions?follow=1")
        (last,) = append(gateway, "the newest one", partition=1)
        expect(page.locator(f'#transactions tr[data-transaction="{last}"]')).to_contain_text(
            "the newest one"
        )


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_no_page_overflows_and_all_texts_have_contrast(
    browser: Browser, gateway: GatewayProcess, size: tuple[int, int], is_dark: bool
):
    with open_console(browser, gateway.url, size=size, is_dark=is_dark) as console:
        for fragment in PAGES:
            console.open(fragment)
            expect(console.page.locator("main h1")).to_be_visible()
            assert console.page.evaluate(OVERFLOW) <= 0, fragment
            weak = console.page.evaluate(CONTRAST)
            assert weak == [], (fragment, weak)


def test_a_change_is_made_with_the_keyboard_alone(
    browser: Browser, cluster: LocalCluster, gateway: GatewayProcess
):
    server = member_address(cluster, "server-1")
    with open_console(browser, gateway.url) as console:
        page = console.page
        console.open("#/")
        wait_until_healthy(console, 3)
        page.keyboard.press("g")
        page.keyboard.press("h")
        page.wait_for_selector('[data-change="prefer"]')
        press_tab_until(console, '[data-change="prefer"]')
        page.keyboard.press("Enter")
        page.wait_for_selector("#change-partitions:focus")
        page.keyboard.type("0-3")
        page.keyboard.press("Tab")
        page.keyboard.type(server)
        press_tab_until(console, "#change-review")
        page.keyboard.press("Enter")
        page.wait_for_selector("#change-title:focus")
        press_tab_until(console, "#change-start")
        page.keyboard.press("Enter")
        page.wait_for_selector('[data-testid="change"][data-name="prefer"][data-state="done"]')
        console.open("#/")
        assert page.wait_for_function(
            "server => [...document.querySelectorAll('#partitions-table tbody tr')]"
            ".filter(row => row.textContent.includes(server)).length === 4",
            arg=server,
        )


def press_tab_until(console: ConsolePage, selector: str) -> None:
    """Press Tab until this element has the focus."""
    for _ in range(60):
        console.page.keyboard.press("Tab")
        if console.page.locator(f"{selector}:focus").count():
            return
    raise AssertionError(f"{selector} cannot be reached with Tab")


# Returns the texts whose contrast with their background is below 4.5 (3 for large texts).
CONTRAST = """
() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const background = (node) => {
    for (let each = node; each !== null; each = each.parentElement) {
      const color = parse(getComputedStyle(each).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((each) => each.nodeType === 3)
      .map((each) => each.textContent.trim()).join("");
    if (text === "" || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (node.disabled || node.closest("[disabled], .visually-hidden, script, style")) continue;
    const style = getComputedStyle(node);
    const one = light(parse(style.color)), other = light(background(node));
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize), isBold = Number(style.fontWeight) >= 700;
    const large = size >= 24 || (isBold && size >= 18.6);
    if (ratio < (large ? 3 : 4.5)) weak.push(`${text}: ${ratio.toFixed(2)}`);
  }
  return weak;
}
"""
