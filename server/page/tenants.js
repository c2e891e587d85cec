// Tenants and keys: what each may use and has used; keys are created and revoked, and limits changed. Texts are set as text.

/** @typedef {Record<string, any>} Tenant */

const EVERY_MS = 5000;
const PERIODS = [["tokens_per_day", "Tokens today"], ["tokens_per_month", "Tokens this month"], ["money_per_day", "Spent today"], ["money_per_month", "Spent this month"]];
const LIMITS = ["requests_per_minute", "burst_requests", "tokens_per_minute", "burst_tokens", "concurrent_requests", ...PERIODS.map(([name]) => name)];

/** @param {string} id @returns {any} */
const $ = (id) => document.getElementById(id);

/** @param {string} tag @param {string} text @param {string} [name] of its class */
function made(tag, text, name = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

/** @param {string} name @param {number} value */
const amount = (name, value) => (name.startsWith("money") ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value.toLocaleString("en"));
/** @param {string} name */
const words = (name) => name.replaceAll("_", " ");

/**
 * The section's behaviour.
 * @param {(path: string, more?: RequestInit) => Promise<Response>} ask
 * @param {(answer: Response) => Promise<string>} refusal
 * @returns {() => void} to be called at each frame: asks the server every five seconds
 */
export function tenants(ask, refusal) {
  let asked = -Infinity, hasFile = true;
  /** @type {Tenant[]} */
  let shown = [];

  /** @param {string} text */
  const say = (text) => { $("tenants-told").textContent = text; };

  /** @param {string} path @param {RequestInit} [more] @returns {Promise<any>} null: it was refused, and that is told */
  async function get(path, more = {}) {
    const answer = await ask(path, more).catch(() => null);
    if (answer?.ok) return answer.json();
    say(answer === null ? "The server does not answer." : await refusal(answer));
    return null;
  }

  async function refresh() {
    asked = Date.now();
    const [answer, keys] = await Promise.all([get("/admin/tenants"), hasFile ? ask("/admin/keys").catch(() => null) : null]);
    if (answer) show(answer.data);
    if (keys?.status === 404) hasFile = false;
    $("keys").hidden = !keys?.ok;
    if (keys?.ok) showKeys((await keys.json()).data);
  }

  /** @param {Tenant} tenant @param {string} name */
  function used(tenant, name) {
    const cell = made("td", "", "number"), left = tenant.left[name], num = tenant.used[name];
    cell.textContent = amount(name, num);
    if (left) cell.append(made("span", ` of ${amount(name, left.limit)}`, "quiet"));
    if (tenant.is_near.includes(name)) {
      const part = Math.floor(100 * num / left.limit);
      cell.append(made("strong", part >= 100 ? " spent" : ` ${part} %`, "bad"));
    }
    return cell;
  }

  /** @param {Tenant[]} list */
  function show(list) {
    shown = list;
    const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.of : undefined;
    $("tenants").tBodies[0].replaceChildren(...list.flatMap((tenant) => [tenant, ...tenant.keys].map((one) => {
      const line = document.createElement("tr"), head = made("th", one === tenant ? tenant.name : `key ${one.id}`, one === tenant ? "" : "inner");
      /** @type {HTMLTableCellElement} */ (head).scope = "row";
      const buckets = Object.entries(one.left).filter(([name]) => name.endsWith("minute"));
      const states = buckets.map(([name, pool]) => `${amount(name, pool.left)} of ${amount(name, pool.limit)} ${words(name)}`);
      line.append(head, made("td", one === tenant ? `${tenant.class}, ${tenant.share}` : ""), made("td", String(one.num_active), "number"),
        made("td", states.join("; ") || "–"), ...PERIODS.map(([name]) => used(one, name)));
      const last = made("td", "");
      if (one === tenant) {
        const button = made("button", "Limits");
        button.setAttribute("aria-label", `Change the limits of ${tenant.name}`);
        button.dataset.of = tenant.name;
        button.addEventListener("click", () => edit(tenant.name));
        last.append(button);
      }
      line.append(last);
      return line;
    })));
    if (focused !== undefined) $("tenants").querySelector(`[data-of="${CSS.escape(focused)}"]`)?.focus();
    const names = list.map((tenant) => tenant.name), select = $("new-tenant");
    if (names.join("\n") !== [...select.options].map((one) => one.value).join("\n")) {
      select.replaceChildren(...names.map((name) => Object.assign(made("option", name), { value: name })));
    }
  }

  /** @param {Record<string, any>[]} list */
  function showKeys(list) {
    const focused = document.activeElement instanceof HTMLElement ? document.activeElement.dataset.key : undefined;
    const valid = list.filter((one) => one.state === "valid"), others = list.length - valid.length;
    $("keys-about").textContent = `${valid.length} valid${others ? `, ${others} revoked or expired` : ""}`;
    $("key-list").tBodies[0].replaceChildren(...[...valid, ...list.filter((one) => one.state !== "valid")].slice(0, 200).map((one) => {
      const line = document.createElement("tr"), head = /** @type {HTMLTableCellElement} */ (made("th", one.prefix));
      head.scope = "row";
      line.append(head, made("td", one.tenant), made("td", one.label), made("td", one.scopes.join(", ")), made("td", one.state, one.state === "valid" ? "" : "quiet"),
        made("td", one.expires ? new Date(one.expires).toLocaleString() : "never"));
      const last = made("td", "");
      if (one.state === "valid") {
        const button = made("button", "Revoke");
        button.setAttribute("aria-label", `Revoke the key ${one.prefix}`);
        button.dataset.key = one.prefix;
        button.addEventListener("click", () => confirmEnd(one));
        last.append(button);
      }
      line.append(last);
      return line;
    }));
    if (focused !== undefined) $("key-list").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  /** @param {Record<string, any>} one */
  function confirmEnd(one) {
    const what = `Revoke the key ${one.prefix} of ${one.tenant}? Its requests in progress end.`;
    choose(what, [], async () => (await get(`/admin/keys/${encodeURIComponent(one.prefix)}`, { method: "DELETE" })) && `The key ${one.prefix} is revoked.`);
  }

  /** @param {string} name */
  function edit(name) {
    const tenant = shown.find((one) => one.name === name);
    if (!tenant) return;
    const fields = LIMITS.map((limit) => ({ name: limit, value: tenant.limits[limit] ?? "" }));
    choose(`Limits of ${name}, until the configuration is read again. Empty: unlimited.`, fields, async (values) => {
      const limits = Object.fromEntries(Object.entries(values).filter(([, text]) => text !== "").map(([limit, text]) => [limit, Number(text)]));
      const body = JSON.stringify({ limits });
      return (await get(`/admin/tenants/${encodeURIComponent(name)}`, { method: "PATCH", body })) && `The limits of ${name} are in force.`;
    });
  }

  /**
   * A dialog with fields of numbers.
   * @param {string} what
   * @param {{name: string, value: string | number}[]} fields
   * @param {(values: Record<string, string>) => Promise<string | null>} act what is told once it is done
   */
  function choose(what, fields, act) {
    $("choice-title").textContent = what;
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

  $("new-key").addEventListener("submit", async (/** @type {Event} */ event) => {
    event.preventDefault();
    const scopes = [...$("new-key").querySelectorAll("[name=scope]:checked")].map((/** @type {any} */ one) => one.value);
    const asked = { tenant: $("new-tenant").value, label: $("new-label").value, scopes, expires: $("new-expires").value || null };
    const made_ = await get("/admin/keys", { method: "POST", body: JSON.stringify(asked) });
    if (!made_) return;
    say(`The key ${made_.prefix} of ${made_.tenant} is valid from now on.`);
    $("created").hidden = false;
    $("created-key").value = made_.key;
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
