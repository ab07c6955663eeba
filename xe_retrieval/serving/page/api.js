// The API's description, rendered from openapi.json without anything from elsewhere.

import { request } from "./requests.js";
import { $, make } from "./words.js";

const api = await request("api/openapi.json");

/** Follows a reference into the description. */
const resolve = (schema) => schema?.$ref ? schema.$ref.slice(2).split("/").reduce((at, key) => at[key], api) : schema;

function typeOf(schema) {
  const found = resolve(schema) ?? {};
  const several = found.anyOf ?? found.oneOf;
  if (several) return several.map(typeOf).join(" or ");
  if (found.enum) return found.enum.join(" or ");
  if (found.const !== undefined) return String(found.const);
  if (found.type === "array") return `list of ${typeOf(found.items)}`;
  if (schema?.$ref) return found.title;
  return found.format === "binary" ? "file" : found.type ?? "anything";
}

function limits(schema) {
  const found = [schema, ...(schema?.anyOf ?? [])].map(resolve).filter(Boolean);
  const value = (key) => found.map((one) => one[key]).find((one) => one !== undefined);
  const [low, high, items, length, usual] = ["minimum", "maximum", "maxItems", "maxLength", "default"].map(value);
  return [
    low !== undefined && high !== undefined ? `${low} to ${high}` : low !== undefined ? `from ${low} on` : "",
    items !== undefined ? `at most ${items}` : "",
    length !== undefined ? `at most ${length} characters` : "",
    usual !== undefined && usual !== null && usual !== "" ? `default ${usual}` : "",
  ].filter(Boolean).join("; ");
}

function table(rows) {
  const body = make("tbody", "", ...rows.map(([name, schema, description]) => make("tr", "",
    make("th", "", name), make("td", "", typeOf(schema)),
    make("td", "", [description ?? resolve(schema)?.description, limits(schema)].filter(Boolean).join(" · ").replaceAll("`", "")))));
  for (const cell of body.querySelectorAll("th")) cell.scope = "row";
  return make("div", "scroll", make("table", "", body));
}

/** The object that a schema is or contains, for its table of fields. */
function objectIn(schema) {
  const found = resolve(schema);
  if (found?.properties) return found;
  const inner = found?.items ?? found?.anyOf?.[0];
  return inner ? objectIn(inner) : null;
}

function section(title, ...content) {
  const summary = make("summary", "", title);
  return make("details", "", summary, ...content);
}

/** A table of an object's fields, and of the fields of each object in it. */
function fields(object) {
  const all = Object.entries(object.properties);
  const inner = all.map(([name, schema]) => [name, objectIn(schema)]).filter(([, found]) => found);
  return [
    table(all.map(([name, schema]) => [name, schema, schema.description])),
    ...inner.map(([name, found]) => section(`${name}: ${found.title}`, ...fields(found))),
  ];
}

function operation(path, method, about) {
  const parts = [make("h2", "", make("code", "", `${method.toUpperCase()} ${path}`)), make("p", "", about.description ?? about.summary)];
  if (about.parameters?.length) {
    parts.push(section("Parameters", table(about.parameters.map((p) => [p.name, p.schema, p.description]))));
  }
  for (const [kind, { schema }] of Object.entries(about.requestBody?.content ?? {})) {
    const object = objectIn(schema);
    if (object) parts.push(section(`Body: ${kind}`, ...fields(object)));
  }
  const kinds = Object.keys(about.requestBody?.content ?? {}).filter((kind) => kind.startsWith("image/"));
  if (kinds.length) parts.push(make("p", "", `Or a picture as the body: ${kinds.join(", ")}.`));
  for (const [status, response] of Object.entries(about.responses)) {
    const [kind, content] = Object.entries(response.content ?? {})[0] ?? [];
    const object = status === "200" && objectIn(content?.schema);
    if (object) parts.push(section(`Answer: ${kind}`, ...fields(object)));
  }
  const errors = Object.entries(about.responses).filter(([status]) => status !== "200");
  if (errors.length) {
    parts.push(section("Errors", table(errors.map(([status, r]) => [status, { type: "detail" }, r.description]))));
  }
  return make("section", "", ...parts);
}

$("title").textContent = `API of ${api.info.title}`;
$("description").textContent = api.info.description;
$("operations").append(...Object.entries(api.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, about]) => operation(path, method, about))));
