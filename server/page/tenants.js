// Tenants and keys: what each may use and has used; keys are created and revoked, and limits changed.

import { $, emptyRow, fill, made, refusal, tell } from "/dashboard/elements.js";

/** @typedef {import("/dashboard/elements.js").Row} Row */

const EVERY_MS = 5000;
const MAX_KEYS = 200; // shown
const PERIODS = ["tokens_per_day", "tokens_per_month", "money_per_day", "money_per_month"]; // a column each
const LIMITS = ["requests_per_minute", "burst_requests", "tokens_per_minute", "burst_tokens", "concurrent_requests", ...PERIODS];

const KEYS = "each_key:_"; // before the name of a limit of each of a tenant's keys

/** @param {string} name @param {number} value */
const amount = (name, value) => (name.startsWith("money") ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value.toLocaleString("en"));
/** @param {string} name */
const words = (name) => name.replaceAll("_", " ");

/**
 * The section's behaviour.
 * @param {(path: string, more?: RequestInit) => Promise<Response>} ask
 * @returns {() => void} to be called at each frame: asks the server every five seconds
 */
export function tenants(ask) {
  let asked = -Infinity, numAsked = 0;
  /** @type {Row[]} */
  let shown = [];
  /** @type {string | null} */
  let after = null; // the last tenant of the page before

  /** @param {string} text */
  const say = (text) => tell($("tenants-told"), text);

  /** @param {string} path @param {RequestInit} [more] @returns {Promise<any>} null: it was refused, and that is told */
  async function get(path, more = {}) {
    const answer = await ask(path, more).catch(() => null);
    if (answer?.ok) return answer.json();
    say(answer === null ? "The server does not answer." : await refusal(answer));
    return null;
  }

  async function refresh() {
    asked = Date.now();
    const number = ++numAsked;
    const query = new URLSearchParams({ find: $("find-tenant").value.trim(), ...(after === null ? {} : { after }) });
    const found = await get(`/admin/tenants?${query}`), keys = found?.has_keys_file ? await get("/admin/keys") : null;
    if (number !== numAsked) return; // another page is asked for
    if (!found) after = null;
    else {
      show(found.data);
      $("tenants-next").hidden = !found.has_more;
      $("tenants-first").hidden = after === null;
    }
    $("keys").hidden = !keys;
    if (keys) showKeys(keys.data);
  }

  /** @param {Row} row @param {string} name @returns {[string, boolean]} in words, and whether it is near its end */
  function used(row, name) {
    const left = row.left[name], num = row.used[name];
    if (!left) return [amount(name, num), false];
    const part = Math.floor(100 * num / left.limit), isNear = row.is_near.includes(name);
    return [`${amount(name, num)} of ${amount(name, left.limit)}${isNear ? part >= 100 ? ", spent" : `, ${part} %` : ""}`, isNear];
  }

  /** @param {string} label @param {string} what for those who do not see where it stands @param {() => void} act */
  function action(label, what, act) {
    const button = made("button", label);
    button.setAttribute("aria-label", what);
    button.addEventListener("click", act);
    return button;
  }

  /** @param {Row[]} list */
  function show(list) {
    shown = list;
    const rows = list.flatMap((tenant) => [{ ...tenant, id: tenant.name, isTenant: true }, ...tenant.keys.map((/** @type {Row} */ one) => ({ ...one, id: `${tenant.name} ${one.id}`, name: `key ${one.id}` }))]);
    fill($("tenants").tBodies[0], rows, (row) => {
      const line = emptyRow(9, [2, 4, 5, 6, 7]);
      if (row.isTenant) line.cells[8].append(action("Limits", `Change the limits of ${row.name}`, () => edit(row.name)));
      else line.cells[0].className = "inner";
      return line;
    }, (cells, row) => {
      const buckets = Object.entries(row.left).filter(([name]) => name.endsWith("minute"));
      const left = buckets.map(([name, pool]) => `${amount(name, pool.left)} of ${amount(name, pool.limit)} ${words(name)}`);
      const texts = [row.name, row.isTenant ? `${row.class}, ${row.share}` : "", row.num_active, left.join("; ") || "–"];
      texts.forEach((text, i) => tell(cells[i], String(text)));
      PERIODS.forEach((name, i) => {
        const [text, isNear] = used(row, name);
        tell(cells[4 + i], text);
        cells[4 + i].className = isNear ? "number bad" : "number";
      });
    }, "None.");
    const names = list.map((tenant) => tenant.name), select = $("new-tenant");
    if (names.join("\n") !== [...select.options].map((one) => one.value).join("\n")) {
      select.replaceChildren(...names.map((name) => Object.assign(made("option", name), { value: name })));
    }
  }

  /** @param {Row[]} list */
  function showKeys(list) {
    const valid = list.filter((one) => one.state === "valid"), others = list.filter((one) => one.state !== "valid");
    tell($("keys-about"), `${valid.length} valid${others.length ? `, ${others.length} revoked or expired` : ""}`);
    fill($("key-list").tBodies[0], [...valid, ...others].slice(0, MAX_KEYS).map((one) => ({ ...one, id: one.prefix })), (row) => {
      const line = emptyRow(7, []);
      if (row.state === "valid") line.cells[6].append(action("Revoke", `Revoke the key ${row.prefix}`, () => confirmEnd(row)));
      return line;
    }, (cells, row) => {
      const expires = row.expires ? new Date(row.expires).toLocaleString() : "never";
      [row.prefix, row.tenant, row.label, row.scopes.join(", "), row.state, expires].forEach((text, i) => tell(cells[i], text));
      if (row.state !== "valid") cells[6].replaceChildren();
    }, "None.");
  }

  /** @param {Row} one */
  function confirmEnd(one) {
    const what = `Revoke the key ${one.prefix} of ${one.tenant}? Its requests in progress end.`;
    choose(what, "Revoke", [], async () => (await get(`/admin/keys/${encodeURIComponent(one.prefix)}`, { method: "DELETE" })) && `The key ${one.prefix} is revoked.`);
  }

  /** @param {string} name */
  function edit(name) {
    const tenant = shown.find((one) => one.name === name);
    if (!tenant) return;
    const fields = ["", KEYS].flatMap((of) => LIMITS.map((limit) => ({ name: `${of}${limit}`, value: tenant[of ? "key_limits" : "limits"][limit] ?? "" })));
    choose(`Limits of ${name}, and of each of its keys, until the configuration is read again. Empty: unlimited.`, "Save", fields, async (values) => {
      const given = Object.entries(values).filter(([, text]) => text !== "");
      /** @param {boolean} isOfKeys */
      const limitsOf = (isOfKeys) => Object.fromEntries(given.filter(([limit]) => limit.startsWith(KEYS) === isOfKeys).map(([limit, text]) => [limit.replace(KEYS, ""), Number(text)]));
      const body = JSON.stringify({ limits: limitsOf(false), key_limits: limitsOf(true) });
      return (await get(`/admin/tenants/${encodeURIComponent(name)}`, { method: "PATCH", body })) && `The limits of ${name} are in force.`;
    });
  }

  /**
   * A dialog with fields of numbers.
   * @param {string} what
   * @param {string} yes what the button says
   * @param {{name: string, value: string | number}[]} fields
   * @param {(values: Record<string, string>) => Promise<string | null>} act what is told once it is done
   */
  function choose(what, yes, fields, act) {
    tell($("choice-title"), what);
    tell($("choice-yes"), yes);
    $("choice-fields").replaceChildren(...fields.map(({ name, value }) => {
      const label = made("label", words(name)), input = document.createElement("input");
      Object.assign(input, { name, value, type: "number", min: "0", step: "any" });
      label.append(input);
      return label;
    }));
    $("choice").onclose = async () => {
      if ($("choice").returnValue !== "yes") return;
      const inputs = /** @type {HTMLInputElement[]} */ ([...$("choice-fields").querySelectorAll("input")]);
      const told = await act(Object.fromEntries(inputs.map((one) => [one.name, one.value])));
      if (told) say(told);
      await refresh();
    };
    $("choice").returnValue = "";
    $("choice").showModal();
  }

  /** @param {string | null} name */
  const turnTo = (name) => {
    after = name;
    refresh();
  };
  $("find-tenant").addEventListener("input", () => turnTo(null));
  $("tenants-first").addEventListener("click", () => turnTo(null));
  $("tenants-next").addEventListener("click", () => turnTo(shown.at(-1)?.name ?? null));
  $("new-key").addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    const scopes = [...$("new-key").querySelectorAll("[name=scope]:checked")].map((/** @type {any} */ one) => one.value);
    const asked = { tenant: $("new-tenant").value, label: $("new-label").value, scopes, expires: $("new-expires").value || null };
    const created = await get("/admin/keys", { method: "POST", body: JSON.stringify(asked) });
    if (!created) return;
    say(`The key ${created.prefix} of ${created.tenant} is valid from now on.`);
    $("created").hidden = false;
    $("created-key").value = created.key;
    $("created-key").focus();
    $("created-key").select();
    $("new-label").value = "";
    await refresh();
  });
  $("created-done").addEventListener("click", () => {
    $("created-key").value = "";
    $("created").hidden = true;
    $("new-label").focus();
  });
  return () => { if (Date.now() - asked >= EVERY_MS && !document.hidden) refresh(); };
}
