// /docs: shows /openapi.json. Routes by surface; a route's fields are made when it is opened.

import { $, made, tell } from "/dashboard/elements.js";

/** @typedef {Record<string, any>} Schema of JSON Schema, or a part of the document */

const MAX_DEPTH = 4; // of fields within fields
const MOST = 2 ** 31 - 1; // bounds from there on are those of the integers here

/** @type {Schema} */
let schemas = {};

/** What a reference stands for. @param {Schema} schema @returns {Schema} */
const found = (schema) => (schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema);

/** The schemas that a value may have, but for null: that is as good as absent. @param {Schema} schema @returns {Schema[]} */
const kinds = (schema) => (schema.anyOf ?? [schema]).map(found).filter((/** @type {Schema} */ one) => one.type !== "null");

/** @param {Schema} schema @returns {string} */
function typeOf(schema) {
  const names = kinds(schema).map((one) => {
    if (one.enum) return one.enum.map((/** @type {unknown} */ value) => JSON.stringify(value)).join(", ");
    if (one.type === "array") return one.items ? `array of ${typeOf(one.items)}` : "array";
    return one.type ?? "any";
  });
  return names.join(" or ");
}

/** @param {Schema} schema */
function boundsOf(schema) {
  return kinds(schema).map((one) => [
    one.minimum !== undefined && `≥ ${one.minimum}`, one.exclusiveMinimum !== undefined && `> ${one.exclusiveMinimum}`,
    one.maximum !== undefined && one.maximum < MOST && `≤ ${one.maximum}`,
    one.minLength && `≥ ${one.minLength} characters`, one.maxLength !== undefined && `≤ ${one.maxLength} characters`,
    one.minItems && `≥ ${one.minItems} items`, one.maxItems !== undefined && `≤ ${one.maxItems} items`,
  ].filter(Boolean).join(", ")).filter(Boolean).join("; ");
}

/** @param {string[]} heads @param {(string | Node)[][]} rows @param {string} label */
function table(heads, rows, label) {
  const outer = made("div", "", "scroll"), inner = document.createElement("table"), body = document.createElement("tbody");
  outer.tabIndex = 0;
  outer.setAttribute("role", "region");
  outer.setAttribute("aria-label", label);
  const line = document.createElement("tr"), head = document.createElement("thead");
  for (const name of heads) {
    const cell = /** @type {HTMLTableCellElement} */ (made("th", name));
    cell.scope = "col";
    line.append(cell);
  }
  head.append(line);
  for (const row of rows) {
    const cells = row.map((text, i) => {
      const cell = /** @type {HTMLTableCellElement} */ (document.createElement(i ? "td" : "th"));
      if (!i) cell.scope = "row";
      cell.append(text);
      return cell;
    });
    const one = document.createElement("tr");
    one.append(...cells);
    body.append(one);
  }
  inner.append(head, body);
  outer.append(inner);
  return outer;
}

/** @param {Schema} schema @param {string} [prefix] @param {number} [depth] @returns {(string | Node)[][]} a name, its type, its bounds, its default */
function fieldsOf(schema, prefix = "", depth = 0) {
  return kinds(schema).flatMap((one) => {
    if (one.type === "array" && one.items) return fieldsOf(one.items, `${prefix}[]`, depth);
    const required = one.required ?? [], named = Object.entries(one.properties ?? {});
    const sorted = [...named.filter(([name]) => required.includes(name)), ...named.filter(([name]) => !required.includes(name))];
    return sorted.flatMap(([name, field]) => {
      const path = prefix ? `${prefix}.${name}` : name, isRequired = required.includes(name);
      const usual = isRequired ? "required" : field.default === undefined || field.default === null ? "" : JSON.stringify(field.default);
      const row = [made("code", path), typeOf(field), boundsOf(field), usual];
      return [row, ...(depth < MAX_DEPTH ? fieldsOf(field, path, depth + 1) : [])];
    });
  });
}

/** @param {Schema} schema @param {string} label @returns {Node} */
function fields(schema, label) {
  const rows = fieldsOf(schema);
  return rows.length ? table(["Field", "Type", "Bounds", "Default"], rows, label) : made("p", typeOf(schema), "quiet");
}

/** A command line's word. @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** @param {string} path @param {string} method @param {Schema} operation */
function curlOf(path, method, operation) {
  const example = operation.requestBody?.content["application/json"]?.example, form = operation.requestBody?.content["multipart/form-data"];
  const words = ["curl", ...(method === "get" ? [] : ["-X", method.toUpperCase()]), quoted(`${location.origin}${path}`)];
  if (operation.security.length) words.push("-H", '"authorization: Bearer $KEY"');
  if (example) words.push("-H", quoted("content-type: application/json"), "-d", quoted(JSON.stringify(example)));
  if (form) words.push("-F purpose=batch -F file=@requests.jsonl");
  return words.join(" ");
}

/** @param {Record<string, string>} aliases @param {Record<string, unknown[]>} refused @param {string[]} idle @param {string} route */
function others(aliases, refused, idle, route) {
  const rows = [
    ...Object.entries(aliases).map(([name, target]) => [made("code", name), `another name of ${target}`]),
    ...Object.entries(refused).map(([name, neutral]) => [made("code", name), `refused${neutral.length ? `, but for ${neutral.map((one) => JSON.stringify(one)).join(", ")}` : ""}`]),
    ...idle.map((name) => [made("code", name), "no effect"]),
  ];
  const outer = document.createElement("details");
  outer.append(made("summary", `${rows.length} fields of other servers`), table(["Field", "Here"], rows, `Fields of other servers of ${route}`));
  return outer;
}

/** @param {string} path @param {string} method @param {Schema} operation @returns {Node[]} */
function contents(path, method, operation) {
  const shown = [made("pre", curlOf(path, method, operation))], [scheme] = operation.security, route = `${method.toUpperCase()} ${path}`;
  shown[0].tabIndex = 0;
  shown.push(made("p", scheme ? `Needs a key with the right ${Object.values(scheme)[0]}, where keys are configured.` : "Needs no key.", "quiet"));
  if (operation["x-alias-of"]) shown.push(made("p", `Another name of ${operation["x-alias-of"]}.`));
  if (operation.parameters.length) {
    const rows = operation.parameters.map((/** @type {Schema} */ one) => [made("code", one.name), one.in, typeOf(one.schema), boundsOf(one.schema)]);
    shown.push(made("h3", "Parameters"), table(["Name", "In", "Type", "Bounds"], rows, `Parameters of ${route}`));
  }
  for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    const own = found(schema);
    shown.push(made("h3", `Body, ${type}`), /** @type {HTMLElement} */ (fields(schema, `Fields of the body of ${route}`)));
    if (own["x-aliases"]) shown.push(others(own["x-aliases"], own["x-refused"], own["x-no-effect"], route));
  }
  for (const [status, answer] of Object.entries(operation.responses)) {
    if (Number(status) >= 400) continue;
    for (const [type, { schema }] of Object.entries(answer.content)) {
      const event = kinds(schema.properties?.data ?? schema).find((one) => one.contentSchema)?.contentSchema; // of a stream
      const text = event ? `${status}, each event or line of ${type}` : `${status}, ${type}`;
      shown.push(made("h3", text), /** @type {HTMLElement} */ (fields(event ?? schema, `${text} of ${route}`)));
    }
  }
  const errors = Object.entries(operation.responses).filter(([status]) => Number(status) >= 400);
  shown.push(made("h3", "Errors"), table(["Status", "For"], errors.map(([status, { description }]) => [status, description]), `Errors of ${route}`));
  const [[, first]] = errors;
  shown.push(/** @type {HTMLElement} */ (fields(first.content["application/json"].schema, `Fields of an error of ${route}`)));
  return shown;
}

/** @type {{element: HTMLElement, words: string, section: HTMLElement}[]} */
const routes = [];

/** @param {string} path @param {string} method @param {Schema} operation @param {HTMLElement} section */
function addRoute(path, method, operation, section) {
  const element = document.createElement("details"), head = made("summary", "");
  element.id = operation.operationId;
  head.append(made("code", `${method.toUpperCase()} ${path}`), made("span", ` ${operation.summary}`, "quiet"));
  element.append(head);
  element.addEventListener("toggle", () => {
    if (element.open && element.children.length === 1) element.append(...contents(path, method, operation));
  });
  section.append(element);
  const body = operation.requestBody?.content["application/json"]?.schema;
  const names = [...Object.keys(body ? found(body).properties ?? {} : {}), ...operation.parameters.map((/** @type {Schema} */ one) => one.name)];
  routes.push({ element, words: [path, method, operation.summary, ...names].join(" ").toLowerCase(), section });
}

function search() {
  const wanted = $("search").value.trim().toLowerCase();
  for (const { element, words } of routes) element.hidden = !words.includes(wanted);
  for (const { section } of routes) section.hidden = !section.querySelector("details:not([hidden])");
  const shown = routes.filter(({ element }) => !element.hidden).length;
  tell($("state"), `${shown} of ${routes.length} routes`);
}

/** Open the route that the address names. */
function open() {
  const named = /** @type {HTMLDetailsElement | undefined} */ (routes.find(({ element }) => `#${element.id}` === location.hash)?.element);
  if (named) {
    named.open = true;
    named.scrollIntoView();
  }
}

async function show() {
  const answer = await fetch("/openapi.json");
  if (!answer.ok) throw new Error(`/openapi.json answers ${answer.status}`);
  const found = await answer.json(), sections = new Map();
  schemas = found.components.schemas;
  tell($("about"), `The API, version ${found.info.version}`);
  tell($("description"), found.info.description);
  for (const [path, methods] of Object.entries(found.paths)) {
    for (const [method, operation] of Object.entries(/** @type {Schema} */ (methods))) {
      const [surface] = operation.tags;
      if (!sections.has(surface)) {
        const section = document.createElement("section");
        section.append(made("h2", surface));
        $("routes").append(section);
        sections.set(surface, section);
      }
      addRoute(path, method, operation, sections.get(surface));
    }
  }
  $("search").addEventListener("input", search);
  addEventListener("hashchange", open);
  search();
  open();
}

show().catch((error) => tell($("state"), `This page cannot be shown: ${error.message}`));
